"""One model of a table with its writers (text, Markdown, CSV, LaTeX, HTML), and the look of pictures."""
