"""`tilefold info`: what is installed, what is there to compute on, and which backend runs where."""

from __future__ import annotations

import json as jsons
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

OPTIONAL = ("triton", "rich", "typer", "matplotlib", "numpy", "transformers")


def command(json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Versions, devices, and what each backend can run on them."""
    from tilefold.testing import record

    devices = _devices()
    records = {name: record.state(suite=suite) for name, suite in record.SUITES.items()}
    found = {
        "versions": _versions(),
        "devices": devices,
        "backends": _backends(devices),
        "gpu_records": {
            name: {"kind": state.kind, "sentence": state.sentence} for name, state in records.items()
        },
        "cache": _cache(),
    }
    if json:
        typer.echo(jsons.dumps(found, indent=2))
        return
    console = Console(highlight=False)
    for title, table in (
        ("Versions", _listed((name, value or "not installed") for name, value in found["versions"].items())),
        ("Devices", _listed((device["kind"], _described(device)) for device in devices)),
        ("GPU records", _listed([(state.kind, state.sentence) for state in records.values()])),
        ("Cache", _listed([(found["cache"]["folder"], ", ".join(found["cache"]["files"]) or "empty")])),
    ):
        console.print(Text(title, style="bold"))
        console.print(table)
        console.print()
    _print_backends(console, found["backends"])


def _versions() -> dict[str, str | None]:
    """Versions by name; None for what is not installed. Nothing is imported for it beyond torch."""
    import torch

    import tilefold

    found: dict[str, str | None] = {
        "tilefold": tilefold.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return found | {name: _installed(name) for name in OPTIONAL}


def _installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """The CPU, and every CUDA device; memory in bytes."""
    import torch

    from tilefold.cost.measure import model

    found: list[dict[str, Any]] = [
        {
            "kind": "cpu",
            "name": model(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    ]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(
            {
                "kind": f"cuda:{index}",
                "name": about.name,
                "memory": about.total_memory,
                "capability": f"{about.major}.{about.minor}",
            }
        )
    return found


def _backends(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether each backend runs a small typical call on the CPU and on CUDA, and why not."""
    import torch

    from tilefold import Problem, masks, ops
    from tilefold.planning.backend import KNOWN_BACKENDS

    found = []
    for kind in ("cpu", "cuda"):
        present = any(device["kind"].startswith(kind) for device in devices)
        problem = Problem(1, 8, 8, 1024, 1024, 64, 64, torch.bfloat16, kind)
        form = masks.lower(masks.causal(), (), 1, 8, 1024, 1024, "cpu")
        for name in KNOWN_BACKENDS:
            backend = ops.load(name)
            reasons = [backend] if isinstance(backend, str) else list(backend.why_not(problem, form))
            if not present:
                reasons.append(f"this PyTorch sees no {kind} device")
            found.append({"device": kind, "backend": name, "runs": not reasons, "reasons": reasons})
    return found


def _cache() -> dict[str, Any]:
    """Where measurements of this machine are kept, and those that there are."""
    from tilefold.cost import store

    folder = store.folder()
    return {"folder": str(folder), "files": sorted(path.name for path in folder.glob("*.json"))}


def _listed(entries: Any) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in entries:
        table.add_row(f"  {name}", Text(value))
    return table


def _described(device: dict[str, Any]) -> str:
    """One line about a device."""
    if device["kind"] == "cpu":
        return f"{device['name']}, {device['threads']} threads, {device['capability']}"
    from tilefold.cost.units import size

    return f"{device['name']}, {size(device['memory'])}, compute capability {device['capability']}"


def _print_backends(console: Console, found: list[dict[str, Any]]) -> None:
    console.print(Text("Backends", style="bold"), Text("(for a small causal call in bfloat16)", style="dim"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    device = None
    for entry in found:
        text = Text("runs", style="green") if entry["runs"] else Text("; ".join(entry["reasons"]))
        table.add_row("" if entry["device"] == device else f"  {entry['device']}", entry["backend"], text)
        device = entry["device"]
    console.print(table)
