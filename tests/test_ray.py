"Ray Train starts the processes, and makes their group: the Learner trains in it as it is"
import json
import os
from pathlib import Path

import pytest

ray = pytest.importorskip('ray', reason="Ray Train is not installed (pip install 'fastbench[ray]')")
pytest.importorskip('ray.train.torch', reason="Ray Train is not installed (pip install 'fastbench[ray]')")
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = Path(__file__).parent


def train(config):
    import torch
    import torch.distributed as dist
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    import fastbench.distributed.learner
    from fastbench.machine.group import gather, rank, world_size
    from fastbench.train.learner import BenchLearner
    made, res = dist.is_initialized(), {}
    items = [(torch.randn(8), i % 2) for i in range(32)]
    for strategy in ('ddp', 'fsdp'):
        torch.manual_seed(0)
        learn = BenchLearner(DataLoaders(DataLoader(items, bs=4), DataLoader(items[:8], bs=4)), torch.nn.Linear(8, 2), loss_func=torch.nn.CrossEntropyLoss(), lr=.1)
        with learn.distributed(strategy, cpu=True), learn.no_bar(), learn.no_logging(): learn.fit(2)
        sums = gather(sum(p.sum().item() for p in learn.model.parameters()))
        res[strategy] = dict(made=made, left=dist.is_initialized(), world_size=world_size(), engine=learn.engine['strategy'], same=sums[0] == sums[1], steps=learn.train_iter)
    if rank() == 0: Path(config['out']).write_text(json.dumps(res))


@pytest.fixture(scope='module')
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=dict(env_vars=dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]))))
    yield
    ray.shutdown()


def test_two_workers_of_ray_train_together(cluster, tmp_path):
    out = tmp_path/'out.json'
    TorchTrainer(train, train_loop_config=dict(out=str(out)), torch_config=TorchConfig(backend='gloo'), scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                 run_config=ray.train.RunConfig(storage_path=str(tmp_path/'ray'))).fit()
    want = dict(made=True, left=True, world_size=2, same=True, steps=8)  # the group is Ray's, before and after
    assert json.loads(out.read_text()) == {o: dict(want, engine=o) for o in ('ddp', 'fsdp')}
