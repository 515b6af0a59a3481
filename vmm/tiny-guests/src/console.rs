//! Guests that use the first serial port.

guest!(
    hello,
    "lea rsi, [rip + 3f]",
    "mov ecx, 6",
    "mov dx, 0x3f8",
    "rep outsb",
    "power_off",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"hello\\n\"",
);

guest!(talk_for_ever, "2: say 'x'", "jmp 2b");

guest!(
    echo_until_q,
    "say '>'",
    "2: mov dx, 0x3fd",
    "in al, dx",
    "test al, 1",
    "jz 2b",
    "mov dx, 0x3f8",
    "in al, dx",
    "out dx, al",
    "cmp al, 'q'",
    "jne 2b",
    "power_off",
    "3: jmp 3b",
);

// Reports a panic on the console, and through the port of the pvpanic device.
guest!(
    panics,
    "lea rsi, [rip + 3f]",
    "mov ecx, 39",
    "mov dx, 0x3f8",
    "rep outsb",
    "mov dx, 0x505",
    "mov al, 1",
    "out dx, al",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"[ 1.0] Kernel panic - not syncing: boom\"",
);
