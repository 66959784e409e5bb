"""Run kvbench's command line: ``python -m kvbench VERB ...``."""

from kvbench.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
