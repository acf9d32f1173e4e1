"""The page of the benchmarks' results: one HTML file that needs no network. `./run dashboard` writes it.

Data goes one way: `sources` reads the folder, `headline`, `blocks`, `past` and `shared` say what is shown of it as values,
`page` writes them down. No statistics are made here that `benchmarks.figures` and `benchmarks.compare` have.
"""
