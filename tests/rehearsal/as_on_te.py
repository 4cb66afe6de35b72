"""as_on_cuda.py with the layers of Transformer Engine (`te_stand_in.py`), in a new interpreter."""

from tests.rehearsal import te_stand_in

if __name__ == "__main__":
    te_stand_in.install()
    from tests.rehearsal import as_on_cuda

    as_on_cuda.main()
