"""What every room uses: errors, configuration files, examples, files and progress."""
