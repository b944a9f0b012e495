"""What `ember --help` says: short, with examples."""

HELP = """\
ember runs a language model over a file of prompts and writes completions and statistics to Parquet.

  ember KEY=VALUE ...         run a job; python -m ember.run does the same
  ember -cn JOB KEY=VALUE ... run a job file: quickstart, dataset, cache_sweep, pool_size, paper_waste, ..., or your
                              own in ./jobs; in another folder: -cd FOLDER -cn JOB
  ember -m KEY=A,B,C ...      run a job for every value
  ember resume=OUTPUT         go on with the job of an output folder
  ember export OUTPUT --to rows.jsonl
                              one file in input order (.jsonl, .parquet, .csv)
  ember serve KEY=VALUE ...   serve a model on an OpenAI-compatible endpoint
  ember plan KEY=VALUE ...    what a job would take: batch, memory, output, time (calibrate=true measures)
  ember inspect OUTPUT        what is in it: counts, errors, completions, settings, files
  ember top OUTPUT            follow a running job from another terminal
  ember report OUTPUT         a page of pictures and numbers: OUTPUT/report/report.html
  ember version

Examples:
  ember -cn quickstart
  ember data=prompts.jsonl output=results sampling=creative seed=7
  ember data=prompts.jsonl model=gpt2 block_size=32 pool_size=2GiB sampling.max_tokens=200
  ember -m data=prompts.jsonl block_size=8,16,32 pool_size=1024tok,4096tok
  ember data='"a,b.jsonl"'    quotes for a value with , = [ ] ( ) { } # ~ or letters beyond ASCII

Settings (ember --cfg job prints all with their values):
  data         a .jsonl or .parquet file, a folder, a glob, or a list of them
  output       the folder of the results; by default outputs/JOB/DATE-TIME
  model        a preset: tiny, gpt2, gpt2-medium, ...; any other: model.path=FOLDER or model.path=USER/REPO
  sampling     a preset: greedy, precise, balanced, creative; and sampling.temperature, .top_p, .max_tokens, ...
  seed         of the job's random numbers
  block_size   tokens in a block of the KV cache
  pool_size    of the KV cache: blocks (512), tokens (4096tok), bytes (2GiB) or auto
  scheduler    mixed, prefill_first or static

Exit codes: 0 clean, 3 finished with error rows, 2 a mistake in the settings, 130 or 143 interrupted, 1 anything else.
Hydra's own flags: --hydra-help"""
