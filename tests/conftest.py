import os

import torch

# Triton decides when it is first imported, by whomever, whether kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The models of the tests are tiny: a second thread would cost more than it brings, the more so beside other processes.
torch.set_num_threads(1)
