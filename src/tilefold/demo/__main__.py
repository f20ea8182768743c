"""Runs the stations of the demonstration one after the other."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec

import torch

MISSING = "The demonstration draws with rich, which is not installed: pip install 'tilefold[cli]'"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; refuses values that cannot be honoured."""
    parser = argparse.ArgumentParser(
        prog="python -m tilefold.demo",
        description="Exact attention at work on this machine: train, verify, measure, sample.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seconds", type=float, default=75.0, help="training time at most")
    parser.add_argument("--steps", type=int, default=600, help="training steps at most")
    parser.add_argument("--context", type=int, default=4096, help="bytes of context in training")
    parser.add_argument("--dim", type=int, default=128, help="channels of the model")
    parser.add_argument("--layers", type=int, default=3, help="layers of the model")
    parser.add_argument("--budget-mb", type=int, default=1024, help="MiB that one attention call may take")
    parser.add_argument("--max-context", type=int, default=32768, help="tokens in the last row of the table")
    parser.add_argument("--sample", type=int, default=400, help="bytes to write at the end")
    parser.add_argument("--json", action="store_true", help="results as JSON on stdout, the show on stderr")
    options = parser.parse_args(arguments)
    for name in ("seconds", "steps", "context", "dim", "layers", "budget_mb", "max_context", "sample"):
        if getattr(options, name) <= 0:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag}: expected a positive number, got {getattr(options, name)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: this build of PyTorch sees no CUDA device")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every comparison held, 1 if one did not, 2 if a package is missing."""
    options = parse(arguments)
    if find_spec("rich") is None:
        print(MISSING, file=sys.stderr)
        return 2
    from rich.console import Console

    from .show import Show
    from .stations import Demonstration

    began = time.perf_counter()
    show = Show(Console(stderr=options.json, highlight=False))
    demonstration = Demonstration(options, show)
    show.title(describe(demonstration.device))
    results = {
        "machine": describe(demonstration.device),
        "train": demonstration.train(),
        "verify": demonstration.verify(),
        "scale": demonstration.scale(),
        "sample": demonstration.sample(),
        "seconds": time.perf_counter() - began,
    }
    show.end(results["seconds"], demonstration.proven)
    if options.json:
        print(json.dumps(results, indent=2))
    return 0 if demonstration.proven else 1


def describe(device: torch.device) -> str:
    """One line about the machine."""
    threads = f"{torch.get_num_threads()} CPU threads"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    return f"Python {platform.python_version()}, PyTorch {torch.__version__}, {where}"


if __name__ == "__main__":
    sys.exit(main())
