"""Rule rewards, one file per task, and how any reward function is found, called and kept from doing harm.

A reward function is `score(prompt, response, ground_truth, **extra) -> float | dict`. It is called with keywords:

    prompt        str, the rendered prompt text
    response      str, the response text
    ground_truth  the `ground_truth` of the prompt's `reward_model` column, None where there is none
    data_source   str, the prompt's `data_source` column
    extra_info    dict, the prompt's `extra_info` column
    ...           whatever `reward.kwargs` holds

so it names what it reads and takes the rest as `**extra`. A dict needs the key `score`; `acc` is logged as accuracy,
other numbers under their own names, and a string under `pred` is the extracted answer, for majority voting. It may be
`async def`: calls then run concurrently.

It runs in a worker process, which is killed with all it has started when a call takes too long; what it prints goes nowhere.
`mixture` says which functions score a sample, `loading` finds them, `pool` hands out the samples, `worker` is what runs in the
process, and `scoring` what makes a score of a result.
"""
