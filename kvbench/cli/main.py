"""The command line: verbs, help, and the one place where errors become messages and exit statuses."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from textwrap import fill

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.extras import EXTRAS, missing
from kvbench.base.version import version
from kvbench.base.visible import VisibleStream, say
from kvbench.cli.verbs import VERBS, guess_verbs, write_overview
from kvbench.methods.core.loading import locate_error

WIDTH = 100
"""The number of characters in a line of help, as in tables."""


def fold_help(text: str) -> str:
    """Return a help text with lines of at most WIDTH: paragraphs are filled anew, examples and indented lines stay."""
    # first the lines of each paragraph are joined to one
    lines: list[str] = []
    # True if the next line can go on the paragraph of the last one
    in_paragraph = False
    for line in text.splitlines():
        is_indented = line.startswith(" ")
        # "examples:" and "keys: ..." begin a line of their own
        is_labelled = re.match(r"[a-z]+:", line) is not None
        if in_paragraph and line and not is_indented and not is_labelled:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        # an empty line, an example or a heading ends the paragraph
        in_paragraph = bool(line) and not is_indented and not line.endswith(":")
    # an example must stay one line, so that it can be copied
    filled = []
    for line in lines:
        if not line.startswith(" "):
            line = fill(line, WIDTH, break_on_hyphens=False)
        filled.append(line)
    return "\n".join(filled)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Return the exit status: 0 done, 1 failed, 2 a request that cannot be carried out."""
    # before torch is imported: threads that spin long while they wait take a shared machine's time from each other
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    parsed = _parse_arguments(arguments)
    # before a tokenizer is used: after a fork, its threads would warn on stderr
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with redirect_stdout(VisibleStream(sys.stdout, parsed.json)):
            return int(parsed.verb_module.main(parsed))
    except KvbenchError as error:
        say(str(error))
        return error.status
    except KeyboardInterrupt:
        say("interrupted. Finished answers are safe. Run the same command again to go on.")
        return 130
    except BrokenPipeError:
        # the reader has ended, as `head` does: Python would write the rest when it ends, and fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if os.environ.get("KVBENCH_DEBUG"):
            raise
        say(f"{error.filename or 'a file'} cannot be read or written ({error.strerror or error})")
        return 1
    except Exception as error:
        # a missing optional package is the user's to install
        package = _find_missing_package(error)
        if package in EXTRAS:
            say(str(missing(package, parsed.verb)))
            return UsageError.status
        if os.environ.get("KVBENCH_DEBUG"):
            raise
        # any other error must end in a message, too
        say(
            f"internal error, {locate_error(error, '')}. Finished answers are safe. The environment variable "
            "KVBENCH_DEBUG=1 shows all calls that led there. Please report it unless it is in code of your own"
        )
        return 1


def _find_missing_package(error: Exception) -> str:
    """Return the name of the package that an import did not find; '' for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    package, _, _ = str(error.name).partition(".")
    return package


class CommandParser(argparse.ArgumentParser):
    """The parser of ``kvbench COMMAND``. Its help lists the verbs in groups, with a line each."""

    def format_help(self) -> str:
        """Return the text of ``kvbench --help``."""
        return (
            f"usage: {self.usage}\n\nMeasure what KV-cache compression costs in accuracy and saves in memory.\n\n"
            f"{write_overview()}\nRun `kvbench COMMAND --help` for options and examples.\n"
        )


def _check_verb(arguments: Sequence[str]) -> None:
    """End the process with status 2, and a question which verb was meant, if the first argument is a word and no verb.

    Without arguments, print the verbs and end it with the same status.
    """
    if not arguments:
        print(CommandParser(usage="kvbench [-h] [--version] COMMAND ...").format_help(), end="", file=sys.stderr)
        raise SystemExit(UsageError.status)
    word = arguments[0]
    if word in VERBS or word.startswith("-"):
        return
    question = ""
    meant_verbs = guess_verbs(word)
    if "=" in word:
        # a key of run without the verb
        question = f" Did you mean kvbench run {word}?"
    elif meant_verbs:
        question = f" Did you mean {' or '.join(meant_verbs)}?"
    say(f"unknown command {word}.{question} All commands: `kvbench --help`.")
    raise SystemExit(UsageError.status)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments, with the verb's module as ``verb_module``. Ends the process for a mistake."""
    if arguments is None:
        arguments = sys.argv[1:]
    parser = _build_parser()
    # argparse's own message for an unknown verb would list all of them
    _check_verb(arguments)
    parsed, extra = parser.parse_known_args(arguments)
    if extra:
        # options may stand between overrides: a word that argparse did not take is an override or a mistake
        mistakes = [word for word in extra if word.startswith("-")]
        takes_overrides = hasattr(parsed, "overrides")
        if mistakes or not takes_overrides:
            hint = ". Keys are typed without --, as in results=FOLDER" if takes_overrides else ""
            words = " ".join(mistakes or extra)
            parser.error(f"unrecognised: {words}{hint} (see kvbench {parsed.verb} --help)")
        parsed.overrides = parsed.overrides + extra
    return parsed


def _build_parser() -> CommandParser:
    """Return the parser of all verbs. Parsed arguments have the verb's module as ``verb_module``."""
    parser = CommandParser(prog="kvbench", usage="kvbench [-h] [--version] COMMAND ...")
    parser.add_argument("--version", action="version", version=f"kvbench {version()}")
    # the help of a verb is argparse's own
    verbs = parser.add_subparsers(
        dest="verb", metavar="COMMAND", required=True, prog="kvbench", parser_class=argparse.ArgumentParser
    )
    for verb, entry in VERBS.items():
        module = import_module(entry["module"])
        verb_parser = verbs.add_parser(
            verb,
            description=entry["about"],
            epilog=fold_help(entry["help"]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            conflict_handler="resolve",  # a verb may have a --help of its own
        )
        module.arguments(verb_parser)
        verb_parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
        verb_parser.set_defaults(verb_module=module)
    return parser
