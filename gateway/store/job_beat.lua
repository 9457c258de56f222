-- ARGV  worker, its configuration, how many models it has, these, then any number of: id, token of its claim.
-- Returns the ids of those that it no longer has.

local worker, config, models = unpack(ARGV, OWN_ARGUMENTS, OWN_ARGUMENTS + 2)
local lost, behind = {}, OWN_ARGUMENTS + 3 + models

insist(TAG)
for i = OWN_ARGUMENTS + 3, behind - 1 do
    serve(worker, config, ARGV[i])
end
for i = behind, #ARGV, 2 do
    local job = load(ARGV[i])
    if holds(job, ARGV[i + 1]) then
        -- Claiming what one has already, with JUSTID, does nothing but set its time to now.
        local kept = redis.pcall('XCLAIM', job.stream, GROUP, job.worker, 0, job.entry, 'JUSTID')
        if kept.err or #kept == 0 then -- its stream was deleted by hand
            set(job, {stream = '', entry = ''})
            for _ = 1, SWEPT_MAX do -- what somebody else has written to it since goes first
                if take(job, job.worker) then
                    break
                end
            end
        end
    else
        lost[#lost + 1] = ARGV[i]
    end
end
sweep()
return lost
