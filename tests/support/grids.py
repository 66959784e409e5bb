"""Grids of small cases in one test: every case runs, and those that fail are told together."""

import functools
import inspect

import pytest


def grid(names, values, ids=None):
    """Run a test over all values as ``parametrize`` does, in one test; several stack to their product.

    A thousand cases of a millisecond cost a second as one test, and ten as tests of their own. Fixtures are shared.
    """
    keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    cases = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]

    def fold(test):
        @functools.wraps(test)
        def all_cases(**fixtures):
            failed, skipped = [], []
            for case in cases:
                try:
                    test(**case, **fixtures)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append((case, error))
            if failed:
                lines = (f"{case}: {error}" for case, error in failed[:10])
                raise AssertionError("\n".join([f"{len(failed)} of {len(cases)} cases", *lines])) from failed[0][1]
            if len(skipped) == len(cases):
                raise skipped[0]

        kept = [p for p in inspect.signature(test).parameters.values() if p.name not in keys]
        all_cases.__signature__ = inspect.Signature(kept)
        del all_cases.__wrapped__
        return all_cases

    return fold
