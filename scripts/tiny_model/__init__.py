"""How the embedded tiny model was made: its beginning, its training and its card."""
