"What the benchmarks share: a median with its interval, and what it says of a bar"
from scipy.stats import binom


def middle(xs):
    "The least that the median may be, the median, the most: order statistics that hold it in 95 of 100"
    xs = sorted(xs)
    rank = int(binom.ppf(.025, len(xs), .5))
    return xs[max(0, rank-1)], xs[len(xs)//2], xs[-max(1, rank)]


def verdict(low, high, bar):
    "Is what lies between `low` and `high` shown to be under the bar?"
    return 'met' if high < bar else 'not met' if low > bar else 'within the interval: not shown'
