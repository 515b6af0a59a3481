//! Guests that end, reset or crash a VM, or use one of its CPUs' features.

guest!(
    reset_register,
    "mov dx, 0xcf9",
    "mov al, 6",
    "out dx, al",
    "2: jmp 2b"
);

guest!(keyboard_reset, "mov al, 0xfe", "out 0x64, al", "2: jmp 2b");

guest!(triple_fault, "nop", "ud2");

guest!(
    init_reached,
    "mov dx, 0x5f4",
    "mov al, 0x7b",
    "out dx, al",
    "power_off",
    "2: jmp 2b"
);

guest!(
    unknown_port,
    "mov dx, 0x1234",
    "in eax, dx",
    "mov dx, 0x3f8",
    "out dx, eax",
    "power_off",
    "2: jmp 2b",
);

// Prints `1` if the time stamp counter is invariant, else `0`.
guest!(
    is_tsc_invariant,
    "mov eax, 0x80000007",
    "cpuid",
    "bt edx, 8",
    "mov al, 0x30",
    "adc al, 0",
    "mov dx, 0x3f8",
    "out dx, al",
    "power_off",
    "2: jmp 2b",
);

// Waits for channel 2 of the 8254 to count 10 ms, as Linux does in `pit_calibrate_tsc`, and prints the
// status that it then has.
guest!(
    wait_for_timer,
    "in al, 0x61",
    "and al, 0xfd",
    "or al, 1",
    "out 0x61, al",
    "mov al, 0xb0",
    "out 0x43, al",
    "mov al, 0x9b",
    "out 0x42, al",
    "mov al, 0x2e",
    "out 0x42, al",
    "2: in al, 0x61",
    "test al, 0x20",
    "jz 2b",
    "mov al, 0xe8",
    "out 0x43, al",
    "in al, 0x42",
    "mov dx, 0x3f8",
    "out dx, al",
    "power_off",
    "3: jmp 3b",
);

guest!(halt_for_ever, "say 'h'", "2: hlt", "jmp 2b");

guest!(
    second_cpu,
    // Copies the code of the second CPU, which starts in real mode, to 0x8000.
    "lea rsi, [rip + 4f]",
    "mov rdi, 0x8000",
    "mov ecx, 32",
    "rep movsb",
    // Enables the local APIC; sends INIT, then start-up with page 8, to APIC 1.
    "mov rbx, 0xfee00000",
    "mov dword ptr [rbx + 0xf0], 0x1ff",
    "mov dword ptr [rbx + 0x310], 0x01000000",
    "mov dword ptr [rbx + 0x300], 0x4500",
    "mov dword ptr [rbx + 0x310], 0x01000000",
    "mov dword ptr [rbx + 0x300], 0x4608",
    "mov rbx, 0x8f00",
    "2: cmp byte ptr [rbx], 1",
    "jne 2b",
    "say 'B'",
    "power_off",
    "3: jmp 3b",
    "4:",
    ".code16",
    "mov dx, 0x3f8",
    "mov al, 'A'",
    "out dx, al",
    "xor ax, ax",
    "mov ds, ax",
    "mov byte ptr [0x8f00], 1",
    "5: hlt",
    "jmp 5b",
    ".code64",
    ".skip 16",
);

guest!(
    touch_absent_page,
    "mov rbx, 0x300000",
    "mov al, [rbx]",
    "power_off",
    "2: jmp 2b",
);

guest!(run_where_no_memory_is, "mov rax, 0xd0000000", "jmp rax");
