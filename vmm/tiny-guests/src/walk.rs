//! Guests that access much memory.

guest!(
    count_for_ever,
    "say 'r'",
    "mov rbx, 0x200000",
    "2: inc qword ptr [rbx]",
    "jmp 2b",
);

// Repeatedly increments a word in each page between 2 and 48 MiB.
guest!(walk_for_ever, "say 'r'", "2: walk", "jmp 2b",);

// Like `walk_for_ever`, and prints 64 bytes of each page.
guest!(
    talk_and_walk,
    "say 'r'",
    "mov dx, 0x3f8",
    "2: mov rbx, 0x200000",
    "3: inc qword ptr [rbx]",
    "mov rsi, rbx",
    "mov ecx, 64",
    "rep outsb",
    "add rbx, 0x1000",
    "cmp rbx, 0x3000000",
    "jb 3b",
    "jmp 2b",
);

// Increments the first and the last word of each page between 2 and 48 MiB, again and again, and prints
// the lower halves of both.
guest!(
    count_and_walk,
    "say 'r'",
    "mov dx, 0x3f8",
    "2: mov rbx, 0x200000",
    "3: inc qword ptr [rbx]",
    "inc qword ptr [rbx + 0xff8]",
    "mov rsi, rbx",
    "mov ecx, 4",
    "rep outsb",
    "lea rsi, [rbx + 0xff8]",
    "mov ecx, 4",
    "rep outsb",
    "add rbx, 0x1000",
    "cmp rbx, 0x3000000",
    "jb 3b",
    "jmp 2b",
);

// Waits for its power button. Then walks as `walk_for_ever` does, and after each round reads six
// pages at each of 1500 random places. Reboots at the second press of the button.
guest!(
    wander,
    "mov dx, 0x602",
    "mov ax, 0x100",
    "out dx, ax",
    "say 'r'",
    "mov dx, 0x600",
    "6: in ax, dx",
    "test ah, 1",
    "jz 6b",
    // Writing 1 clears a status bit.
    "out dx, ax",
    "mov r9, 1",
    "mov r10, 0x5851f42d4c957f2d",
    "2: walk",
    "mov ecx, 1500",
    // The upper half of a linear congruential generator selects any page except the last five.
    "3: imul r9, r10",
    "inc r9",
    "mov rax, r9",
    "shr rax, 32",
    "imul rax, rax, 11771",
    "shr rax, 32",
    "shl rax, 12",
    "lea rbx, [rax + 0x200000]",
    "mov edx, 6",
    "4: mov rax, [rbx]",
    "add rbx, 0x1000",
    "dec edx",
    "jnz 4b",
    "dec ecx",
    "jnz 3b",
    "mov dx, 0x600",
    "in ax, dx",
    "test ah, 1",
    "jz 2b",
    "mov dx, 0xcf9",
    "mov al, 6",
    "out dx, al",
    "5: jmp 5b",
);

// Walks as `walk_for_ever` does until its power button, whose event it enables, is pressed.
guest!(
    walk_until_power_button,
    "mov dx, 0x602",
    "mov ax, 0x100",
    "out dx, ax",
    "say 'r'",
    "2: walk",
    "mov dx, 0x600",
    "in ax, dx",
    "test ah, 1",
    "jz 2b",
    "say 'b'",
    "power_off",
    "4: hlt",
    "jmp 4b",
);

// Walks as `walk_until_power_button` does, and then checks that each word was incremented once in each
// round: prints `k` if so, else `!`.
guest!(
    count_until_power_button,
    "mov dx, 0x602",
    "mov ax, 0x100",
    "out dx, ax",
    "say 'r'",
    "xor r8d, r8d",
    "2: walk",
    "inc r8",
    "mov dx, 0x600",
    "in ax, dx",
    "test ah, 1",
    "jz 2b",
    "mov rbx, 0x200000",
    "3: cmp qword ptr [rbx], r8",
    "jne 5f",
    "add rbx, 0x1000",
    "cmp rbx, 0x3000000",
    "jb 3b",
    "say 'k'",
    "4: power_off",
    "hlt",
    "jmp 4b",
    "5: say '!'",
    "jmp 4b",
);

guest!(
    walk_and_check,
    "say 'r'",
    "mov ecx, 3",
    "2: walk",
    "dec ecx",
    "jnz 2b",
    // Each word was incremented three times, wherever its page was in between.
    "mov rbx, 0x200000",
    "3: cmp qword ptr [rbx], 3",
    "jne 5f",
    "add rbx, 0x1000",
    "cmp rbx, 0x3000000",
    "jb 3b",
    "say 'k'",
    "4: power_off",
    "hlt",
    "jmp 4b",
    "5: say '!'",
    "jmp 4b",
);
