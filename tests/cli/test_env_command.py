import json

import optimum_neuronal


def test_it_tells_what_computes_here(run):
    found = json.loads(run("env", "--json"))
    assert found["optimum_neuronal"] == optimum_neuronal.__version__ and found["threads"] >= 1
    assert found["kernel in use"].partition(":")[0] in ("torch", *found["kernels that run here"].split(", "))
    table = run("env")
    assert all(name in table for name in found) and found["processor"] in table
