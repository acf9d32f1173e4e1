"""The page of the benchmarks' results: one HTML file without a script or a network. `./run dashboard` writes it.

`sources` reads the folder; `changed`, `tiles`, `figures` and `tables` make values; `charts` draws; `page` writes.
"""
