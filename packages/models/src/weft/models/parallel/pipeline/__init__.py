"""Pipeline parallelism: a model cut into stages, and the code that runs the stages."""
