"""Plain functions where a run takes a Loss or a TokenSelection."""

from rl.training.loss import Loss, TokenSelection


def test_a_plain_function_may_name_the_outputs_that_it_reads():
    def function(micro, totals):
        return micro, {}

    assert Loss.of(function) == Loss(function, reads=None)
    function.reads = ("divergence",)
    loss = Loss.of(function)
    assert loss == Loss(function, reads=("divergence",)) and Loss.of(loss) is loss


def test_a_plain_function_may_select_tokens():
    def function(batch, values, seed):
        return values > seed

    assert TokenSelection.of(function) == TokenSelection(function, "logprobs")
    function.reads = "entropy"
    selection = TokenSelection.of(function)
    assert selection == TokenSelection(function, "entropy") and TokenSelection.of(selection) is selection
