"""The parts that every room uses: errors, configuration files, examples, files and progress."""
