"""The verbs of papers, which the command line loads by name.

The command line loads the modules of all verbs at every start, and adds ``--json`` to the arguments of each. Modules
that take long to load are therefore imported inside the functions that need them.
"""
