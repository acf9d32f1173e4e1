"""How long tests wait before they take a process for hung."""

# Seconds: ten times the slowest wait, because other programs may use the cores, too. Less than the limit of a whole
# test in noxfile.py, because a failed wait can name the process that hangs.
PATIENCE = 300.0
