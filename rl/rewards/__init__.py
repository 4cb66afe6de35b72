"""Rule rewards, one file per task, and how any reward function is found (`loading`) and called (`scoring`).

A reward function is `score(prompt, response, ground_truth, **extra) -> float | dict`. It is called with keywords:

    prompt        str, the rendered prompt text
    response      str, the response text
    ground_truth  the `ground_truth` of the prompt's `reward_model` column, None where there is none
    data_source   str, the prompt's `data_source` column
    extra_info    dict, the prompt's `extra_info` column
    ...           whatever `reward.kwargs` holds

so it names what it reads and takes the rest as `**extra`. A dict needs the key `score`; `acc` is logged as accuracy,
other numbers under their own names. It may be `async def`.
"""
