from gpu_logicmix.cli import main

main()
