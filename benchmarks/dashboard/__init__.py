"""The page of the benchmarks' results: one HTML file without a script, which needs no network. `./run dashboard` writes it.

Data goes one way: `sources` reads the folder; `changed`, `tiles`, `figures` and `tables` make values; `charts` draws; `page` writes.
"""
