import torch

# The models of the tests are tiny: a second thread would cost more than it brings, the more so beside other processes.
torch.set_num_threads(1)
