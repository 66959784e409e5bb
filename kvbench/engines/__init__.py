"""Rows that another engine measures on kvbench's prompts: an OpenAI-compatible server, or llama.cpp in this process."""
