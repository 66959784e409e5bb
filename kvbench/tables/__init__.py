"""Tables as text, Markdown, CSV and LaTeX, and the look of pictures."""
