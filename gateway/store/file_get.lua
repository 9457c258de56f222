-- ARGV  ids. Returns those files that there are.

local found = {}
for i = OWN_ARGUMENTS, #ARGV do
    found[#found + 1] = show_file(ARGV[i]) or nil
end
return found
