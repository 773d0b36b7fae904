"What each process does in test_resume_ranks.py: train with checkpoints, alone or with others, be killed, asked to stop or hindered in writing, and go on in the same or another number of processes"
import faulthandler, hashlib, json, os, random, shutil, signal, sys, traceback, warnings
from pathlib import Path

import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import Learner  # adds fit_one_cycle
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets, TfmdDL
from fastai.learner import Recorder
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper
from fastai.torch_core import get_model, set_seed
from functools import partial
from torch import nn

import fastbench.distributed.fsdp  # else each forked process would import it, and what optimizers import at their first step
import fastbench.distributed.learner  # adds distributed
import fastbench.distributed.ranks
import torch.distributed.tensor
import torch._dynamo
from fastbench.callback.ema import EMACallback
from fastbench.machine import group
from fastbench.machine.shards import whole
from fastbench.train.checkpoint import HEADER, STATE, checkpoints, read_header
from fastbench.train.learner import BenchLearner
from fastbench.train.resume import CheckpointEvery
from fastbench.train.weights import export_weights

N, BS = 80, {1: 8, 2: 8, 4: 4}  # 10, 5 and 5 steps an epoch


def noisy(i, X):
    "An item with draws of all three generators"
    return X[i] + torch.randn(6)*.1 + random.random()*.01 + float(np.random.rand())*.01


def dls():
    g = torch.Generator().manual_seed(3)
    X, Y = torch.randn(N, 6, generator=g), torch.randint(0, 3, (N,), generator=g)
    ds = Datasets(list(range(N)), [[partial(noisy, X=X)], [lambda i: Y[i]]])
    return DataLoaders(TfmdDL(ds, bs=BS[group.world_size()], shuffle=True, num_workers=0), TfmdDL(ds, bs=16, num_workers=0), device='cpu')


class Net(nn.Module):
    "Two layers that share their weight, and a buffer that training uses, of which with FSDP each process has its own"
    _no_split_modules = ['Sequential']
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(.5))
        self.a, self.b, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.b.weight = self.a.weight
        self.register_buffer('running', torch.zeros(6))
    def forward(self, x):
        if self.training:
            with torch.no_grad(): self.running.mul_(.8).add_(x.mean(0), alpha=.2)
        x = x - self.running.clone()
        return self.head(torch.tanh(self.b(torch.tanh(self.a(self.body(x))))))


def learner(path, opt=Adam, width=16, cbs=(), bench=True):
    set_seed(7)
    if group.rank() and group.world_size() == 2: torch.rand(3)  # each process draws for itself
    return (BenchLearner if bench else Learner)(dls(), Net(width), loss_func=nn.CrossEntropyLoss(), opt_func=opt, metrics=[accuracy], path=path, cbs=list(cbs))


def digest(learn):
    "Weights and optimizer, whole, the same words in any number of processes"
    w, o = whole(get_model(learn.model).state_dict()), whole(learn.opt.state_dict()['state'])
    params = {k: v for k, v in w.items() if 'running' not in k and 'tracked' not in k}
    states = [(k, v) for s in (o.values() if isinstance(o, dict) else o) for k, v in s.items() if isinstance(v, torch.Tensor)]
    data = [(k, v.shape, v.numpy().tobytes()) for k, v in [*params.items(), *states]]
    return hashlib.sha1(repr(data).encode()).hexdigest()


class Digests(Callback):
    "What weights and optimizer were when a step began, by the count of steps"
    def __init__(self): self._seen = {}
    def before_batch(self):
        if self.training and self.learn.train_iter in (0, 8, 9): self._seen[self.learn.train_iter] = digest(self.learn), float(self.learn.pct_train), float(self.learn.opt.hypers[-1]['lr'])


class At(Callback):
    "Does something in one process, at one step"
    order = 500
    def __init__(self, f, step, rank=1, event='after_backward'): self._f, self._step, self._rank, self._event = f, step, rank, event
    def __call__(self, event_name):
        if event_name == self._event and getattr(self, 'training', False) and not self.learn.lock.locked() and self.learn.train_iter == self._step and group.rank() == self._rank: self._f()


def killed(): os.kill(os.getpid(), signal.SIGKILL)
def asked(): os.kill(os.getpid(), signal.SIGTERM)


def hindered():
    "Files of more than 3 kB cannot be written by this process"
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


def relieved():
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


OPTS = dict(adam=Adam, adamw=partial(OptimWrapper, opt=torch.optim.AdamW))
DOES = dict(killed=[At(killed, 9)], killed_alone=[At(killed, 9, 0)], asked=[At(asked, 11)], hindered=[At(hindered, 2, event='before_batch'), At(relieved, 12, event='before_batch')], none=[])


def train(path, strategy=None, opt='adam', does='none', every=4, more=(), tell=None, **kwargs):
    "What a training came to"
    lines, digests = [], Digests()
    learn = learner(path, OPTS[opt], **kwargs)
    cbs = [digests, *DOES[does], *more]
    cb = every and CheckpointEvery(steps=every, resume=True, tell=lines.append)
    def fit():
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(3, 1e-2, cbs=cbs + ([cb] if every else []))
        if strategy == 'fsdp': learn.save_weights('trained')
    if strategy:
        with learn.distributed(strategy, cpu=True, tell=lambda o: None): fit()
    else: fit()
    if strategy != 'fsdp': learn.save_weights('trained')
    return dict(losses=[float(o) for o in learn.recorder.losses], lrs=[float(o) for o in learn.recorder.lrs], values=[[float(v) for v in o] for o in learn.recorder.values],
                weights=[p.detach().flatten().tolist() for p in learn.model.parameters()], digests=digests._seen, lines=[o.replace(str(path), 'HERE') for o in lines],
                resumed=cb.resumed if every else [], failed=cb.failed if every else [], train_iter=learn.train_iter, own=[k for k in ('one_batch', '_with_events') if k in vars(learn)])


def said(f):
    "An error in one line"
    try: return f()
    except BaseException as e: return dict(error=f'{type(e).__name__}: {e}' if not isinstance(e, SystemExit) else f'exit {e.code}')


def forked(folder, world, f, *args, **kwargs):
    "What `f` gives in each of `world` processes, or the negative number of the signal that ended it"
    folder.mkdir(parents=True, exist_ok=True)
    names, pids = [folder/f'{os.urandom(4).hex()}-{i}.json' for i in range(world)], []
    store = str(folder/f'store-{os.urandom(4).hex()}')
    for i, out in enumerate(names):
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            faulthandler.dump_traceback_later(300, exit=True)
            if world > 1: torch.distributed.init_process_group('gloo', store=torch.distributed.FileStore(store), rank=i, world_size=world)
            out.write_text(json.dumps(said(lambda: f(*args, **kwargs))))
        except BaseException: traceback.print_exc()
        finally: os._exit(0)
    status = [os.waitpid(o, 0)[1] for o in pids]
    return [-os.WTERMSIG(s) if os.WIFSIGNALED(s) else json.loads(o.read_text()) if o.exists() else None for s, o in zip(status, names)]


def copied(path, name):
    "The checkpoints of a folder, in another one"
    dest = path.parent/name
    shutil.copytree(path/'models', dest/'models')
    return dest


def exported(path, file):
    "Weights that safetensors loads from a checkpoint into a plain model"
    from safetensors.torch import load_model
    m = Net()
    load_model(m, export_weights(checkpoints(path/'models'/'checkpoints')[-1], file))
    return dict(weights=[p.detach().flatten().tolist() for p in m.parameters()], tied=m.a.weight is m.b.weight)


def trained(path):
    "The same of the file that `learn.save_weights` wrote"
    from safetensors.torch import load_model
    m = Net()
    load_model(m, path/'models'/'trained.safetensors')
    return [p.detach().flatten().tolist() for p in m.parameters()]


def at_end(path): return read_header(checkpoints(path/'models'/'checkpoints')[-1])


class Planted:
    def __reduce__(self): return os.mkdir, ('planted',)


def plant(at):
    "A pickle that runs code, with a checksum that is right"
    import pickle
    from zlib import crc32
    data = pickle.dumps(Planted())
    (at/'parts'/'.metadata').write_bytes(data)
    header = json.loads((at/HEADER).read_text())
    header['files']['parts/.metadata'] = dict(bytes=len(data), crc32=crc32(data))
    (at/HEADER).write_text(json.dumps(header))


def cut_off(name):
    def f(at): (at/name).write_bytes((at/name).read_bytes()[:-30])
    return f


BAD = dict(another=lambda at: None, torn=cut_off('rank-1.pt'), common=cut_off(STATE), part=cut_off('parts/__1_0.distcp'), planted=plant,
           gone=lambda at: (at/'rank-1.pt').unlink(), headless=lambda at: (at/HEADER).unlink())


def of_strategy(at, strategy, opt, more=list):
    "A training that nobody interrupted, one that is killed and goes on in as many processes, and the folder as the kill left it"
    whole = forked(at/'whole', 2, train, at/'whole', strategy, opt, every=None, more=more())
    killed = forked(at/'cut', 2, train, at/'cut', strategy, opt, 'killed', more=more())
    copied(at/'cut', 'kept')
    header = at_end(at/'cut')
    res = dict(whole=whole, killed=killed, files=sorted(str(o.relative_to(at/'cut')) for o in (at/'cut'/'models'/'checkpoints'/'checkpoint-000002').rglob('*') if o.is_file()),
               header={k: header[k] for k in ('train_iter', 'world_size', 'sharded', 'tied', 'steps')}, hidden=[o.name for o in (at/'cut'/'models'/'checkpoints').iterdir() if o.name[0] == '.'])
    res['same'] = forked(at/'cut', 2, train, at/'cut', strategy, opt, more=more())
    return res


def main(at):
    res = dict(ddp=of_strategy(at/'ddp', 'ddp', 'adam'), fsdp=of_strategy(at/'fsdp', 'fsdp', 'adamw'))
    res['average'] = of_strategy(at/'average', 'ddp', 'adam', lambda: [EMACallback(.8, every=3)])
    res['collected'] = of_strategy(at/'collected', 'fsdp', 'adam', lambda: [GradientAccumulation(40), EMACallback(.8, every=3)])
    for s, opt in (('ddp', 'adam'), ('fsdp', 'adamw')):
        for n, strategy in ((4, s), (1, None)):
            path = copied(at/s/'kept', f'on-{n}')
            res[s][f'on_{n}'] = forked(path, n, train, path, strategy, opt)
        res[s]['exported'] = exported(at/s/'cut', at/f'{s}.safetensors')
        res[s]['trained'] = trained(at/s/'cut')
    path = copied(at/'fsdp'/'kept', 'as-ddp')
    res['fsdp']['as_ddp'] = forked(path, 2, train, path, 'ddp', 'adamw')
    one = at/'one'
    res['one'] = dict(killed=forked(one, 1, train, one, None, 'adamw', 'killed_alone'))
    for s in ('ddp', 'fsdp'):
        path = copied(one, f'one-{s}')
        res['one'][s] = forked(path, 2, train, path, s, 'adamw')
    path = copied(one, 'one-one')
    res['one']['one'] = forked(path, 1, train, path, None, 'adamw')
    path = at/'asked'
    res['asked'] = dict(first=forked(path, 2, train, path, 'ddp', 'adam', 'asked', every=50), at=at_end(path)['train_iter'], then=forked(path, 2, train, path, 'ddp', 'adam', every=50))
    for s in ('ddp', 'fsdp'):
        path = at/f'hindered-{s}'
        res[f'hindered_{s}'] = dict(ranks=forked(path, 2, train, path, s, 'adam' if s == 'ddp' else 'adamw', 'hindered', every=3), left=sorted(o.name for o in (path/'models'/'checkpoints').iterdir()))
    for name, spoil in BAD.items():
        path = copied(at/'fsdp'/'kept', f'bad-{name}')
        spoil(checkpoints(path/'models'/'checkpoints')[-1])
        res[f'bad_{name}'] = forked(path, 2, train, path, 'fsdp', 'adamw', width=17 if name == 'another' else 16)
    res['apart'] = forked(at/'apart', 2, train, at/'apart')
    (at/'result.json').write_text(json.dumps(res))


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    os.chdir(sys.argv[1])
    main(Path(sys.argv[1]))
