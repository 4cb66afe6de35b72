"""Rule-based rewards, one file per task, and the machinery that finds and calls any reward function.

A reward function is `score(prompt, response, ground_truth, **extra) -> float | dict`. Its keywords are:

    prompt        str, the rendered prompt text
    response      str, the response text
    ground_truth  the `ground_truth` of the prompt's `reward_model` column, None if there is none
    data_source   str, the prompt's `data_source` column
    extra_info    dict, the prompt's `extra_info` column
    ...           every key of `reward.kwargs`

It names the keywords it reads and takes the rest as `**extra`. A returned dict needs the key `score`. `acc`
is logged as accuracy, other numbers under their own names. A string under `pred` is the extracted answer for
majority voting (blank: the response has none, and does not vote). A string under `feedback` enters a
teacher's prompt (`teacher.template`). The function may be `async def`; its calls then run concurrently.

For example, a function that compares the response with the truth:

    def score(response, ground_truth, **extra):
        return float(response.strip() == ground_truth)

It runs in a worker process; standard output goes to /dev/null there. A call that exceeds its time limit is
ended together with every process it started. `mixture` combines the functions that score a sample, `loading`
imports them, `pool` distributes the samples over workers, and `score` turns a result into a `Score`.
"""
