"""Who communicates: the processes of torch.distributed or a recording of one rank, their groups and their store."""
