"""The communicator over process groups of ``torch.distributed``."""
