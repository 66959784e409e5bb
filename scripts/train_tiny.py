"""Trains the embedded tiny model, exports it and writes its card (with --card-only, only the last)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tiny_model import card, initial, train

from kvbench.models import embedded


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    shape, recipe = initial.Shape(), train.Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--minutes", type=float, default=recipe.minutes, help="training time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--seed", type=int, default=recipe.seed, help="of initialisation and data")
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--hidden", type=int, default=shape.hidden, help="width of the residual stream")
    parser.add_argument("--mlp", type=int, default=shape.mlp, help="width inside the MLP")
    parser.add_argument("--heads", type=int, default=shape.heads, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=shape.kv_heads)
    parser.add_argument("--out", type=Path, default=embedded.path(), help="folder of the exported model")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/train_tiny.pt"), help="state of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint (also exports a finished run)")
    parser.add_argument("--card-only", action="store_true", help="measure the model in --out and rewrite its card")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(card.LENGTHS), help="prompt lengths to measure")
    parser.add_argument("--limit", type=int, default=50, help="examples per task and length to measure")
    return parser.parse_args()


def main() -> None:
    """Train and export the model unless only its card is wanted, then measure it and write the card."""
    args = arguments()
    torch.set_num_threads(args.threads)
    if not args.card_only:
        if args.checkpoint.exists() and not args.resume:
            sys.exit(f"{args.checkpoint} exists: go on with --resume, or choose another --checkpoint")
        shape = initial.Shape(args.layers, args.hidden, args.mlp, args.heads, args.kv_heads)
        recipe = train.Recipe(shape=shape, minutes=args.minutes, seed=args.seed)
        model, progress = train.train(recipe, args.checkpoint, log=lambda line: print(line, flush=True))
        card.export(model, recipe, progress, args.threads, args.out)
    print(card.write(args.out, args.lengths, args.limit))


if __name__ == "__main__":
    main()
