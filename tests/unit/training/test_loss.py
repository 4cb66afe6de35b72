"""Plain functions where a run takes a Loss."""

from rl.training.loss import Loss


def test_a_plain_function_may_name_the_outputs_that_it_reads():
    def function(micro, totals):
        return micro, {}

    assert Loss.of(function) == Loss(function, reads=None)
    function.reads = ("divergence",)
    loss = Loss.of(function)
    assert loss == Loss(function, reads=("divergence",)) and Loss.of(loss) is loss
