"""Rule-based rewards, one file per task, and the code that imports and calls any reward function.

A reward function is `score(prompt, response, ground_truth, **extra) -> float | dict`. Its keywords are:

    prompt        str, the rendered prompt text
    response      str, the response text
    ground_truth  the `ground_truth` of the prompt's `reward_model` column, None if there is none
    data_source   str, the prompt's `data_source` column
    extra_info    dict, the prompt's `extra_info` column
    ...           every key of `reward.kwargs`

The function names the keywords that it reads and takes the rest as `**extra`. If it returns a dict, the dict
needs the key `score`. Its `acc` is logged as accuracy, and other numbers are logged under their own names. A
string under `pred` is the extracted answer for majority voting; if it is blank, the response has no answer
and does not vote. A string under `feedback` is put into the prompt of a teacher (`teacher.template`). The
function may be `async def`. Then its calls run concurrently.

For example, a function that compares the response with the truth:

    def score(response, ground_truth, **extra):
        return float(response.strip() == ground_truth)

The function runs in a worker process, whose standard output goes to /dev/null. A call that exceeds its time
limit is ended together with every process that it started. `mixture` combines the functions that score a
sample, `loading` imports them, `pool` distributes the samples over workers, and `score` turns a result into a
`Score`.
"""
