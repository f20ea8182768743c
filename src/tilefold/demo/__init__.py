"""The demonstration behind `make demo`: real work on real text, checked against standard attention, measured,
and sampled.

    python -m tilefold.demo [--device cuda] [--seconds 75 | --steps N] [--budget-mb 1024] [--json]

One file per station: `corpus` (the text), `train`, `verify`, `scaling`, `sample`; `standard` is what tilefold
is compared with, `probe` measures, `show` draws. The public API and `tilefold.nn` are all that it uses.
"""
