# tfla_warnings(target): the warnings every target of this project is clean under.
function(tfla_warnings target)
  set(warnings -Wall -Wextra -Wpedantic -Wshadow -Wcast-qual -Wnon-virtual-dtor)
  if(TFLA_WERROR)
    list(APPEND warnings -Werror)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>")  # nvcc does not know them
endfunction()
