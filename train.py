from gpu_logicmix.__main__ import main

main()
