from fastbench.bench.child import no_collections

with no_collections(): from fastbench import cli


def main():
    "The `fastbench` command"
    cli.main()


if __name__ == '__main__': main()
