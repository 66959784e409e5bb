"""The making of the embedded tiny model: its beginning, its training and its card."""
