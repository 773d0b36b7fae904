from fastbench.bench.child import no_gc

with no_gc(): from fastbench import cli


def main():
    "The `fastbench` command"
    cli.main()


if __name__ == '__main__': main()
