# ccache where it is installed; a launcher given by the user wins.
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(TFLA_CCACHE ccache)
  mark_as_advanced(TFLA_CCACHE)
  if(TFLA_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${TFLA_CCACHE}")
  endif()
endif()
