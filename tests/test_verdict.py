"Verdicts by simulation: how often they are right, how often wrong, on runs as machines make them; and that nothing but the times decides."
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from scipy import stats

from fastbench.errors import UserError
from fastbench.compare.verdict import compare_many, compare_times, family, holm, percent, shown_above, t_quantile, t_tail

TRIALS = 200
CLAIMS = ('faster', 'slower')


# Runs as they are: what differs from run to run, a machine that drifts, steps that follow each other

def steps(rng, mean, spread, drift, n=60, phi=.9, noise=.02):
    "Seconds of the steps of one run: its own effect, where the machine's drift is, an AR(1) around it"
    e = rng.normal(0, noise, n)
    x = np.empty(n)
    x[0] = e[0]/math.sqrt(1-phi**2)
    for i in range(1, n): x[i] = phi*x[i-1] + e[i]
    return mean*np.exp(rng.normal(0, spread) + drift + x)


def session(rng, effect=1., spread=.01, pairs=10, noise=.02, drift=.01):
    "Interleaved random pairs in one session, while the machine drifts: two lists of runs, each an array of steps"
    walk = np.cumsum(rng.normal(0, drift, 2*pairs))
    runs = [[], []]
    for i in range(pairs):
        first = rng.integers(2)
        for at,side in ((2*i, first), (2*i+1, 1-first)): runs[side].append(steps(rng, effect if side else 1., spread, walk[at], noise=noise))
    return runs


def verdicts(effect, spread, trials=TRIALS, seed=0, session_args=(), **kwargs):
    rng = np.random.default_rng(seed)
    for _ in range(trials):
        a,b = session(rng, effect, spread, **dict(session_args))
        yield compare_times([o.mean() for o in a], [o.mean() for o in b], **kwargs)


@pytest.mark.parametrize('spread', [.01, .05])
@pytest.mark.parametrize('paired', [True, False])
def test_what_is_equal_is_not_called_different(spread, paired):
    assert sum(v.verdict in CLAIMS for v in verdicts(1., spread, paired=paired)) <= .05*TRIALS


def test_also_without_a_threshold():
    "The level is the interval's own, not lent by the threshold; 5% of 600 and two standard deviations"
    assert sum(v.verdict in CLAIMS for v in verdicts(1., .02, 600, seed=1, threshold=0)) <= 600*.05 + 2*math.sqrt(600*.05*.95)


def test_steps_in_one_pot_call_equal_runs_different():
    "The negative control: these runs are hard, and a test that takes steps for runs fails on them"
    rng,wrong = np.random.default_rng(0),0
    for _ in range(TRIALS):
        a,b = (np.concatenate(o) for o in session(rng, 1., .01))
        wrong += stats.ttest_ind(np.log(a), np.log(b), equal_var=False).pvalue < .05
    assert wrong > .3*TRIALS


def test_five_percent_is_seen_at_one_percent_of_noise():
    rng,seen = np.random.default_rng(2),0
    for _ in range(TRIALS):  # 1% from run to run in all
        a,b = rng.normal(0, .01, (2, 10))
        seen += compare_times(np.exp(a), 1.05*np.exp(b)).verdict == 'slower'
    assert seen >= .95*TRIALS


def test_five_percent_is_seen_where_drift_and_steps_make_up_the_one_percent():
    args,rng = dict(noise=.005, drift=.003),np.random.default_rng(10)
    alone = np.std([np.log(session(rng, 1., .007, 1, **args)[0][0].mean()) for _ in range(1000)])
    assert .009 < alone < .012
    assert sum(v.verdict == 'slower' for v in verdicts(1.05, .007, session_args=args)) >= .95*TRIALS


def test_five_percent_cannot_be_told_at_sixteen_percent_of_noise():
    vs = list(verdicts(1.05, .16, 600, seed=3))
    assert sum(v.verdict == 'unknown' for v in vs) >= .9*len(vs)
    assert all(v.detectable > .05 for v in vs) and 'cannot tell' in next(v for v in vs if v.verdict == 'unknown').why


@pytest.mark.parametrize('paired', [True, False])
@pytest.mark.parametrize('spread', [.01, .16])
def test_the_interval_holds_the_truth_in_95_of_100(paired, spread):
    rng,held,n = np.random.default_rng(4),0,1000
    for _ in range(n):
        drift = rng.normal(0, .05, 10) if paired else 0
        a,b = np.exp(rng.normal(0, spread, 10)+drift), 1.07*np.exp(rng.normal(0, spread*(1 if paired else 2), 10)+drift)
        v = compare_times(a, b, paired)
        held += v.low <= 1.07 <= v.high
    assert .935 <= held/n <= .965


def test_same_is_said_of_a_larger_difference_in_5_of_100_at_most():
    rng,wrong,right,n = np.random.default_rng(5),0,0,400
    for _ in range(n):
        a,b = np.exp(rng.normal(0, .003, (2, 12)))
        wrong += compare_times(a, 1.0101*b).verdict == 'same'
        right += compare_times(a, b).verdict == 'same'
    assert wrong <= .05*n and right >= .9*n


def test_what_is_detectable_is_detected_in_80_of_100():
    rng,n,spread = np.random.default_rng(6),600,.03
    for paired in (True, False):
        smallest = np.median([compare_times(*np.exp(rng.normal(0, spread, (2, 10))), paired).detectable for _ in range(200)])
        hit = sum(compare_times(x[0], (1+smallest)*x[1], paired).verdict == 'slower' for x in np.exp(rng.normal(0, spread, (n, 2, 10))))
        assert .74 <= hit/n <= .86


def test_a_family_of_phases_holds_its_level():
    rng,wrong,missed = np.random.default_rng(7),0,0
    for _ in range(TRIALS):
        pairs = {k: np.exp(rng.normal(0, .02, (2, 10))) for k in range(12)}
        wrong += any(v.verdict in CLAIMS for v in compare_many(pairs, threshold=0).values())
        pairs[5] = pairs[5][0],1.15*pairs[5][1]
        missed += compare_many(pairs)[5].verdict != 'slower'
    assert wrong <= .08*TRIALS and missed <= .05*TRIALS


def test_the_gate_stays_shut_at_its_limit():
    rng,tripped = np.random.default_rng(8),0
    for _ in range(TRIALS):
        vs = compare_many({k: (x[0], 1.05*x[1]) for k,x in enumerate(np.exp(rng.normal(0, .02, (6, 2, 10))))})
        tripped += bool(shown_above(vs, .05))
    assert tripped <= .05*TRIALS


# By hand and by SciPy

def test_t_is_scipys():
    for df in (1, 1.3, 2, 4, 9, 17.5, 200, 1e5):
        for p in (.51, .8, .95, .975, .999, .9999999): assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-8)
        for x in (-50, -2, -.1, 0, 1e-9, .5, 2.3, 9, 300): assert t_tail(x, df) == pytest.approx(stats.t.sf(x, df), rel=1e-8, abs=1e-300)
    assert t_tail(math.inf, 3) == 0 and t_tail(-math.inf, 3) == 1


@pytest.mark.parametrize('n', [2, 5, 10, 31])
def test_intervals_are_scipys(n):
    rng = np.random.default_rng(n)
    a,b = np.exp(rng.normal(0, .1, (2, n)))
    d = np.log(b/a)
    v,t = compare_times(a, b, threshold=0),stats.ttest_1samp(d, 0)
    assert (v.low, v.high) == pytest.approx(np.exp(t.confidence_interval(.95))) and v.p == pytest.approx(t.pvalue, rel=1e-4, abs=1e-6) and v.ratio == pytest.approx(np.exp(d.mean()))
    b = np.exp(rng.normal(0, .3, n+3))
    v,t = compare_times(a, b, False, threshold=0),stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
    assert (v.low, v.high) == pytest.approx(np.exp(t.confidence_interval(.95))) and v.p == pytest.approx(t.pvalue, rel=1e-4, abs=1e-6) and v.df == pytest.approx(t.df)


def test_the_robust_interval_covers():
    rng,n = np.random.default_rng(9),600
    for paired in (True, False):
        held = 0
        for _ in range(n):
            v = compare_times(np.exp(.05*rng.standard_t(3, 10)), 1.07*np.exp(.05*rng.standard_t(3, 10)), paired)
            held += v.robust_low <= 1.07 <= v.robust_high
        assert .93 <= held/n <= .985


def test_an_outlier_is_counted_and_stays_in():
    a = [1 + i/1000 for i in range(10)]
    b = [*(1.03*x for x in a[:9]), 30.]
    v = compare_times(a, b)
    assert v.outliers == 1 and v.ratio == pytest.approx(math.exp(np.mean(np.log(b) - np.log(a)))) and v.robust == pytest.approx(1.03, abs=.001)
    assert v.verdict == 'unknown' and '1 outlier counted in' in v.why
    assert compare_times(a, a[:9]+[30.], paired=False).outliers == 1
    assert compare_times([1.]*10, [1.]*9+[30.]).outliers == 1


@pytest.mark.parametrize('n', range(1, 5))
@pytest.mark.parametrize('paired', [True, False])
def test_few_runs_give_figures_and_no_verdict(n, paired):
    v = compare_times([1.]*n, [2.]*(n if paired else 9), paired)
    assert v.ratio == pytest.approx(2) and v.verdict == 'unknown' and 'at least 5' in v.why and (v.low is None) == (n == 1)
    assert not shown_above(dict(a=v), .05)
    json.dumps(v.as_dict(), allow_nan=False)


@pytest.mark.parametrize('a,b,want', [([1.]*5, [1.]*5, 'same'), ([.1]*7, [.3]*7, 'slower'), ([.3]*7, [.1]*7, 'faster'), ([1.]*5, [1.005]*5, 'same'),
                                      ([1e-9]*6, [1e-9]*6, 'same'), ([1e300]*6, [1e300]*6, 'same')])
@pytest.mark.parametrize('paired', [True, False])
def test_no_spread_at_all(a, b, want, paired):
    v = compare_times(a, b, paired)
    assert v.verdict == want and v.low == pytest.approx(v.ratio) == pytest.approx(v.high) and 'do not vary' in v.why
    json.dumps(v.as_dict(), allow_nan=False)


@pytest.mark.parametrize('bad,why', [([1, math.nan], r'\[1\] is nan'), ([0, 1], r'\[0\] is 0'), ([1, -2], r'\[1\] is -2'), ([], 'empty'), ([math.inf, 1], 'inf'),
                                     (['x', 1], 'not a list of seconds'), (None, 'not a list'), ([1, None], 'not a list'), ([1, 2, 3], 'not pairs')])
def test_a_mistake_is_one_line(bad, why):
    for args,name in (((bad, [1, 2]), 'a'), (([1, 2], bad), 'b')):
        with pytest.raises(UserError, match=why) as e: compare_times(*args)
        assert '\n' not in str(e.value) and (why == 'not pairs' or str(e.value)[0] == name)


@pytest.mark.parametrize('threshold', [-.1, 1, 5, math.nan, 'x', None, True])
def test_a_threshold_that_cannot_be(threshold):
    with pytest.raises(UserError, match='threshold'): compare_times([1, 2], [1, 2], threshold=threshold)


@pytest.mark.parametrize('level', [0, 1, 2, -.1, math.nan, 'x', None, True])
def test_a_level_that_cannot_be(level):
    with pytest.raises(UserError, match='level.*above 0 and below 1'): compare_times([1, 2], [1, 2], level=level)


def test_a_family_that_takes_a_verdict_back_says_so():
    rng = np.random.default_rng(1)
    one = next(x for x in (np.exp(rng.normal(0, .02, (2, 10))) for _ in range(999)) if .02 < compare_times(*x, threshold=0).p < .04)
    alone = compare_times(*one, threshold=0)
    v = compare_many({0: one, **{k: np.exp(rng.normal(0, .02, (2, 10))) for k in range(1, 9)}}, threshold=0)[0]
    assert alone.verdict in CLAIMS and v.verdict == 'unknown' and 'one of 9' in v.why and (v.low, v.high) == (alone.low, alone.high)
    assert family({}) == {} and compare_many({}) == {} and shown_above({}, .05) == []
    assert holm([.01, None, .04, .03]) == pytest.approx([.03, None, .06, .06])


def test_words():
    assert [percent(o) for o in (.826, 1.104, 1., 3.5)] == ['17.4% faster', '10.4% slower', 'no difference', '250% slower']
    v = compare_times([1., 1.01, .99, 1., 1.02], [.8, .81, .79, .8, .82])
    assert set('ratio low high verdict detectable'.split()) <= set(v.as_dict()) and '\n' not in str(v)
    with pytest.raises(AttributeError): v.ratio = 1


# Whatever the times are

times = st.floats(1e-6, 1e4)
pairs = st.lists(st.tuples(times, times), min_size=1, max_size=12)
near = st.lists(st.tuples(st.floats(.97, 1.), st.floats(.97, 1.03)), min_size=5, max_size=12)
MIRROR = dict(faster='slower', slower='faster', same='same', unknown='unknown')


def edge(v): return any(p is not None and abs(p-.05) < 1e-6 for p in (v.p, v.p_same))  # rounding decides there


@settings(max_examples=150, deadline=None)
@given(pairs | near, st.booleans())
def test_swapped_is_mirrored(xs, paired):
    a,b = zip(*xs)
    v,w = compare_times(a, b, paired),compare_times(b, a, paired)
    assert w.ratio == pytest.approx(1/v.ratio) and w.robust == pytest.approx(1/v.robust) and w.outliers == v.outliers
    if v.low is None: return
    assert w.detectable == pytest.approx(v.detectable, rel=1e-5) and (w.low, w.high) == pytest.approx((1/v.high, 1/v.low)) and v.low <= v.ratio*(1+1e-12) and v.ratio <= v.high*(1+1e-12)
    assume(not edge(v))
    assert w.verdict == MIRROR[v.verdict]


@settings(max_examples=150, deadline=None)
@given(near, st.floats(1e-3, 1e3), st.booleans())
def test_the_unit_does_not_matter(xs, scale, paired):
    a,b = zip(*xs)
    v,w = compare_times(a, b, paired),compare_times([scale*o for o in a], [scale*o for o in b], paired)
    assert w.ratio == pytest.approx(v.ratio) and (w.low, w.high, w.detectable) == pytest.approx((v.low, v.high, v.detectable), rel=1e-5)
    assume(not edge(v))
    assert w.verdict == v.verdict


@settings(max_examples=100, deadline=None)
@given(near, st.randoms())
def test_the_order_of_pairs_does_not_matter(xs, rnd):
    ys = xs.copy()
    rnd.shuffle(ys)
    assert compare_times(*zip(*ys)) == compare_times(*zip(*xs))


@settings(max_examples=60, deadline=None)
@given(pairs, st.booleans(), st.sampled_from([0, .01, .5]))
def test_any_times_give_json(xs, paired, threshold):
    v = compare_times(*zip(*xs), paired, threshold)
    json.dumps(v.as_dict(), allow_nan=False)
    assert v.verdict in MIRROR and v.why and '\n' not in str(v)


def test_light():
    code = "import sys, fastbench.compare.verdict; print([o for o in ('torch', 'fastai', 'transformers', 'scipy', 'pandas', 'numpy') if o in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'
