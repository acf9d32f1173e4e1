"""How long the tests wait for something before they take it for hung."""

# Seconds: ten times what the slowest takes, so that none is given up where other programs use the cores too. It is less than
# the limit of a whole test, in noxfile.py, since who waits can say what for.
PATIENCE = 300.0
