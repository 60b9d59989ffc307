"""Speed and memory, measured: ``make bench`` (or ``python -m benchmarks``) prints and stores ``results/bench.md``.

One module a comparison, each with the baselines it is measured against: what a user would do instead. Sides take turns within
one run (:mod:`benchmarks.timing`) and must agree on what they compute before their times are compared.
"""
