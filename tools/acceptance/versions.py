def run(task):
    pass
