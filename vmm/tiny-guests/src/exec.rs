//! Guests that behave like the init of `--exec`.

// Sends what the init of `--exec` sends over the second serial port: a greeting, three bytes of
// output, two of errors, and the status 42.
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

// Like `exec_result`, without powering off.
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

// Sends the greeting, and bytes that are not a frame.
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
