"""The methods, a formula a file, with the roles they play and the chains they form."""
