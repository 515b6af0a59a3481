//! Guests that behave like the init of `--exec`.

// Does what the init of `--exec` does: says hello on the second serial port, three bytes of output,
// two of errors, and the status 42.
guest!(
    exec_result,
    "lea rsi, [rip + 3f]",
    "mov ecx, 31",
    "mov dx, 0x2f8",
    "rep outsb",
    "power_off",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"\\000SSI-HV exec 1\\n\\000\"",
    ".ascii \"o\\003\\000a\\000\\377e\\002\\000b\\ns\\001\\000\\052\"",
);

// The same, but it does not switch itself off.
guest!(
    exec_and_stay,
    "lea rsi, [rip + 3f]",
    "mov ecx, 31",
    "mov dx, 0x2f8",
    "rep outsb",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"\\000SSI-HV exec 1\\n\\000\"",
    ".ascii \"o\\003\\000a\\000\\377e\\002\\000b\\ns\\001\\000\\052\"",
);

// Hello, and something that is no frame.
guest!(
    exec_garbled,
    "lea rsi, [rip + 3f]",
    "mov ecx, 19",
    "mov dx, 0x2f8",
    "rep outsb",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"\\000SSI-HV exec 1\\n\\000???\"",
);
