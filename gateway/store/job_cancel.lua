-- ARGV  id. Returns the job, briefly, final by now, or nothing.

local job = load(ARGV[OWN_ARGUMENTS])

if job and not is_final(job) then
    stop(job)
    end_job(job, 'cancelled')
end
return show(ARGV[OWN_ARGUMENTS], true)
