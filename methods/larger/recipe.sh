# The flags of every run of the larger model on one GPU, after train.sh's; methods/arms/run.py reads them.
recipe=(
    --learning_rate 3e-5            # 122 million parameters, cold-started at 5e-4, bear more than a 2B model
    --lr_scheduler_type linear      # a run of minutes has a planned end
    --warmup_steps 5
    --max_completion_length 64      # nine objects counted through take 57 tokens
    --oversample 1                  # an arm of its own
    --adam_beta2 0.99               # a hundred updates are short for a memory of 1,000
    --prompts_per_row 16            # a packed row is an update: prompts of 100 tokens are short
    --gradient_accumulation_steps 1
    --max_grad_norm 1
    --rehearse false                # several runs share the GPU, and a row takes little of it
    --logging_steps 5
    --dataloader_num_workers 1
    --report_to none
)
