"""What training computes is what the server computes."""

import torch
import torch.nn.functional as F

from leyden import ops
from leyden.model.context import Context
from leyden.train.batches import Corpus
from leyden.train.trainer import Options, Trainer
from leyden.types import Request, SamplingParams
from tests.engine.conftest import engine, run
from tests.train.examples import corpus, model


@torch.no_grad()
def training_logprobs(net: torch.nn.Module, data: Corpus) -> list[list[float]]:
    """Log-probability of every token but the first of each example, from one packed forward pass."""
    batch = data.batch(range(len(data)), prompt_weight=1.0)
    with ops.using("training"):
        hidden, _ = net(torch.from_numpy(batch.tokens), Context.packed(list(batch.lens)))
    places, ids, _ = batch.targets(1)
    logprobs = F.log_softmax(net.logits(hidden[places]), -1).gather(1, torch.from_numpy(ids)[:, None])[:, 0]
    return [part.tolist() for part in logprobs.split([n - 1 for n in batch.lens])]


def test_training_logprobs_equal_serving_logprobs() -> None:
    """On a model after some training, examples of all lengths; the server takes them in chunks, several at a time."""
    data = corpus(12, shortest=2, longest=150)
    trainer = Trainer(model(), data, Options(steps=5, batch_tokens=300, mtp_depths=0, lr=1e-2, warmup=0))
    for _ in range(5):
        trainer.step()
    net = trainer.model.eval()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [data.tokens[slice(*data.starts[i : i + 2])].tolist() for i in range(len(data))]
    requests = [Request(id=str(i), prompt=prompt, params=params) for i, prompt in enumerate(prompts)]
    served = run(engine(net, step_tokens=50), [(0, request) for request in requests])
    for i, logprobs in enumerate(training_logprobs(net, data)):
        found = [one.logprob for one in served[str(i)][0].prompt_logprobs[1:]]
        torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=0)
